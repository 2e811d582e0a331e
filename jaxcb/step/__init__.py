"""The device side of a step: buckets, the packed upload, the compiled programs and the arrays that they update.

Below this line nothing knows what a request is: a step is rows of positions, slots and pages.
"""
