"""The engine (SGLang) over HTTP: whether it answers, what it is, how fast it works."""
