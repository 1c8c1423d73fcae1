"""`python -m balance_service`."""

from balance_service.cli import main

main()
