"""
What the number format does to a run: does precision hurt a model of PPOFP16 or SB3's PPO?

``python -m sb3_fp16.audit model.zip --env ID`` asks a saved model, ``AuditCallback`` one in training.
"""

from sb3_fp16.audit.callback import AuditCallback
from sb3_fp16.audit.pictures import draw
from sb3_fp16.audit.report import Audit, audit
from sb3_fp16.audit.verdicts import Verdict

__all__ = ["Audit", "AuditCallback", "Verdict", "audit", "draw"]
