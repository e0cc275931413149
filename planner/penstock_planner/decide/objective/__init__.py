"""What a decision is to achieve, and what the past says about it: the price of late requests, and the floor that it pays for.

`shadow_fleets` simulates fleets of every size alongside the real one. `cost` puts a price on lateness and chooses the
cheapest of these fleets. `model_comparison` compares the model behind them with the requests that really were late, and
`trial` adds one replica for a while where the model does not explain them.
"""
