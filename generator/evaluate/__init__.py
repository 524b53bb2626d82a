"""Is a compiled variant right, are its bits always the same, how fast is it?"""
