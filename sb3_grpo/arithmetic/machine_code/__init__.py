"""
The arithmetic of acting and of an update for small networks: functions of numpy arrays that numba compiles.

Arrays are contiguous and in single precision, with a row for each observation, if nothing else is said.
"""
