"""How the shipped family was made: tasks, tokenizer, training, judging, cards."""
