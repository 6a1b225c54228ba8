"""The operators of deployed models and the kernels behind them."""
