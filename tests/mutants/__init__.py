"""Wrong versions of the product, one change each, and whether the tests tell: `make mutants`."""
