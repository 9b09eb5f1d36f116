"""The built-in engine on torch: model code and weights from Hugging Face transformers; CPU or GPU."""
