"""The paged KV pool: block ids and who holds them (no torch), and the tensors behind them (`storage`)."""
