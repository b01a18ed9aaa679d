"""Save models as folders, share them on the Hugging Face hub, and write model cards"""
from .card import IllustratedCard, model_card, training_settings
from .hub import CARD_FILE, check_pretrained, pull_from_hub, push_to_hub, save_pretrained, write_card

__all__ = [
    'CARD_FILE',
    'IllustratedCard',
    'check_pretrained',
    'model_card',
    'pull_from_hub',
    'push_to_hub',
    'save_pretrained',
    'training_settings',
    'write_card',
]
