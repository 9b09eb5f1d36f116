"""The judge service: scores answers from 0 to 100."""
