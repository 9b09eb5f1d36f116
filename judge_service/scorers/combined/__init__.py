"""A logistic model over the raw scores of other scorers."""
