"""Engines and scorers are extensions: types of options that packages register by entry point, and that build what runs.

`engine:` and `kind:` of the mesh file give an entry point's name. Processes that run neither pass the options through unread;
workers, judges, `penstock check` and `penstock up` read them as the extension's type.
"""
