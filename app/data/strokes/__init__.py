"""Features learnt from no data: random characters, and the frozen nets and the whitening that are made from them.

``python -m murmurfl.app.data.strokes`` makes again what lies in ``app/data/features/weights``. Nothing else imports
this room: what a run needs of it is in those files.
"""
