"""The same private work in other frameworks: pfl, and Flower as it comes."""
