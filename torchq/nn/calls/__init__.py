"""Quantization of operators and function calls in forwards: ``x + y``, ``F.linear(x, self.w)``.

A layer of somebody else's class often computes with a weight itself: it standardises the weight
before a convolution, shares it, or passes it to a function. Such a call is quantized where it
happens, as an operator is that a runtime wants quantized. A place in the code of a forward has a
name, see :mod:`~torchq.nn.calls.routes`, whichever branch runs. Two functions know these places:

:func:`torchq.nn.calls.find.find_calls` runs a model and returns what each module calls at which
place; :func:`~torchq.nn.calls.find.weighted_calls` reads the same from the source alone.

:func:`torchq.nn.calls.modules.route_` converts a module, so that its own forward keeps running
while children compute at these places.
"""
