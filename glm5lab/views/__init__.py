"""What the commands and notebooks show: tables, charts, widgets."""
