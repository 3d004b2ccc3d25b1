"""The scaling study: planned runs, their predicted cost, and their results (13_scaling_study).

`plan.py` lists the runs; `prediction.py` and `costing.py` predict their time, memory and bill;
`run_local.py`, `study_run.py`, `submit.py` and `array_element.py` run them here or as job arrays;
`aggregate.py` turns run records into experiments and `results.py` compares them with predictions;
`pictures.py`, `report.py` and `html_report.py` show them. `playbook.py` reads
published runs on H100s. `lab.py` holds what the notebook plays with.
"""
