"""The lease: which service is active, where several share the records."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make it, with its only row: expired, of nobody."""
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("root", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    epoch = sa.text("'1970-01-01 00:00:00'" if op.get_bind().dialect.name == "sqlite" else "to_timestamp(0)")
    op.execute(sa.insert(lease).values(id=1, number=0, holder="", url="", root="", expires_at=epoch))


def downgrade() -> None:
    """Remove it."""
    op.drop_table("lease")
