"""For tests of code that uses or extends trajstore: data strategies, a model, a backend conformance suite.

Needs the ``testing`` extra (hypothesis, pytest). Nothing in the library imports it.
"""
