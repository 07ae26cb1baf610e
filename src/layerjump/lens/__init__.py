"""What hidden levels already predict."""
