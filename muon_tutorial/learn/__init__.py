"""What lessons are made of: pictures, widgets, checks and guards. Floor 6: it observes, and starts nothing.

=============  =============================================================================================
picture        one self-contained ``<img>`` with words for those who cannot see it
holdings       who holds which boxes of a matrix, from a plan
figures        pure functions from such data to a picture
spectra        pictures of singular values
widgets        thin shells: core controls over a picture
reveal         predict first: the answer's picture comes at the press of a button
checks         exercises: what is wrong with this answer, and a hint
measure        cores, memory and seconds of this machine
small_gpt      a small GPT, trained for a few steps: where real gradients come from
recordings     data recorded from real runs, shipped with the package
replay         one real step, recorded phase by phase and scrubbed without processes
series         the lessons in order, their links, and the paths through them
glossary       the words and symbols that all lessons share
guards         what notebook runners let pass, caught
lesson00       what notebook 00 imports; one such module a lesson
=============  =============================================================================================
"""
