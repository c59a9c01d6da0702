"""The build that a job runs in."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add it: the service's own environment for all jobs there are."""
    op.add_column("jobs", sa.Column("build", sa.String(length=64), nullable=False, server_default=""))


def downgrade() -> None:
    """Remove it."""
    op.drop_column("jobs", "build")
