"""Parts of the HTML page (page.py): the drawn pipeline, the charts, the style and the script."""
