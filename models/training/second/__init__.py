"""The second edition of the models: longer, composed tasks in many wordings, and three tiers of increasing cost."""
