"""`planner report`: the paper's figures for one case, as one HTML page and PNG files.

One module per group of figures: a pure function computes the numbers (a frozen dataclass), another draws
them.
"""
