"""How the service's commands end. It imports nothing: Ctrl-C may come that early."""

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
