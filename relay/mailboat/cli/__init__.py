"""The command line: ``mailboat run``, and what a person needs around it.

One module per group of commands. Commands read manifests, call async functions of the lower layers and print what they
say; they hold no logic of their own. The only package that imports click, and one of two that import rich.
"""
