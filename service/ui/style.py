"""How the page looks: one sheet of styles, light and dark as the reader's system is."""

from pathlib import Path

STYLE = (Path(__file__).parent / "style.css").read_text()
