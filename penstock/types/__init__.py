"""Value types that cross processes, each defined once, for SDK and services. The standard library only.

`penstock.mapper` maps each to the protobuf message of the same name.
"""
