"""Faulty training runs to examine and to mend (notebook 17_clinic)."""
