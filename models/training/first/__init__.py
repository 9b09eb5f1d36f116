"""The first edition of the models: shorter tasks in a few wordings. The second begins with its weights."""
