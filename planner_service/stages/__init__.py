"""Length stages: from the lengths in flight to ranges and instance counts (CascadeInfer, section 4.2). Pure."""
