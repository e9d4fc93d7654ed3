"""`python -m tierstore.service` is `tierstore-serve`."""

from tierstore.service.cli import serve

serve(prog_name="tierstore-serve")
