"""Where the streams of a spec put their exports. Opens nothing; trainer.control.export_store does."""

from headrace.trainer.exports.export_settings import EXPORTS, ExportLocation, address_of, destination_of

__all__ = ["EXPORTS", "ExportLocation", "address_of", "destination_of"]
