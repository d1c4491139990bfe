"""`python -m appliance`: the command line, where no script of that name is on PATH."""

from appliance.cli.main import main

main()
