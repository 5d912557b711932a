"""Generated messages and stubs of the `headrace.v1` API. Run `make proto` to regenerate."""
