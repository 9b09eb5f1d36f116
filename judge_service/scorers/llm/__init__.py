"""Language models that grade."""
