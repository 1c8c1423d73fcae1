"""`python -m balance_service`."""

from balance_service.cli.main import main

main()
