"""The command line: one file for each family of commands. Only here do failures become exit statuses."""
