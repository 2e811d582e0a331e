"""The device side of a step: buckets, the packed upload, the compiled programs and the arrays that they update.

The compiled programs know no request: a step is rows of positions, slots and pages. What packs a step reads the
sampling parameters of its requests.
"""
