"""Parts of the HTML page (conformance/html.py): the drawn pipeline, the charts, the style and the script."""
