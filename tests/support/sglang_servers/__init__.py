"""Real SGLang servers on a CPU, of PyPI's wheel. `stand_ins` has what that wheel imports and no CPU has."""
