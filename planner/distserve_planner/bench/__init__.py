"""Checks of the planner against the paper and the authors' release: Table 3, Fig. 11, and speed."""
