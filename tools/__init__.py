"""Tools of the repository: set-up of .venv, and the checks of the environment files."""
