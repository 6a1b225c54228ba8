"""Quantization of function calls in forwards: ``F.linear(x, self.kernel)`` and the like.

A layer of somebody else's class often computes with a weight itself: it standardises the weight
before a convolution, shares it, or passes it to a function. Such a call is quantized where it
happens. :mod:`~torchq.nn.calls.functions` lists the functions, :mod:`~torchq.nn.calls.find` finds
the calls of a module, and :mod:`~torchq.nn.calls.routed` converts the module, so that its own
forward keeps running while the operands of these calls pass through quantizers.
"""
