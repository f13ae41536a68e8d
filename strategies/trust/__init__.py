"""Whom machines trust: whose noise is in a sum, and which words, checks and files follow."""
