"""Training of the shipped models: tasks, tokenizer, training, judge, model cards."""
