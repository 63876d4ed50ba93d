"""The built-in needle model: its tokenizer and config as data files, its weights set by hand.

``build.py`` writes the data files, ``weights.py`` the weights; ``engine_shim.model.needle_text`` writes the
text that the model answers.
"""
