"""Programs a person runs: python -m tools.<name>. `python -m tools` lists them."""
