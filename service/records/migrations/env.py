"""Alembic's environment: migrates over the connection that service.records.database gives."""

from alembic import context

from headrace.service.records.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,  # in the transaction that the caller has begun: all changes, or none
    render_as_batch=True,
)
context.run_migrations()
