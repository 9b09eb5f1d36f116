"""The family's second edition: longer, composed tasks in many wordings, and a price ladder of three tiers."""
