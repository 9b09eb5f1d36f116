"""The built-in engine on llama.cpp: GGUF files, in every quantisation that it reads."""
